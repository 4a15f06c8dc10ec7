"""What holds for every test: hypothesis runs without deadlines, and the launcher's variables are not ours."""

import os

from hypothesis import settings

from tests.ranks import four_ranks as four_ranks  # fixtures of every test
from tests.ranks import two_ranks as two_ranks

# A deadline would be an assertion about time; a shared machine breaks it. CI repeats what it saw, a person explores.
settings.register_profile("ours", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("ours")

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)
