"""What a run recorded of itself, for scripts of your own.

    from torchtitan_lite.metrics import read_accounts

Importing it imports no torch. What is not in `__all__` may move without notice.
"""

from torchtitan_lite.accounts import Accounts, Start, read_accounts

__all__ = ["Accounts", "Start", "read_accounts"]
