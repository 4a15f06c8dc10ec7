"""A run as one page: what it cost, what it saved, where its time went.

The files that a run leaves in its dump folder are read and never changed, also while the run writes them. Everything
between reading and the page is a function of plain values, and no module here imports torch. The figures in the page
are those of the files: `<data value>` has them in full next to the rounded text.
"""
