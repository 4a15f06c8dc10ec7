"""The manager in trainers of other libraries, a module each. A module imports its library when it is imported."""
