"""Become another program that ends with the process that asked for it; run as a script, nothing imports it.

Invariants:
- The order matters: a change of user clears the death signal, and a parent that died before the signal was
  set would never send it.
- Runs before the program and as root, perhaps: the standard library alone, no site-packages (-I -S).

Arguments: the user's id and group's id (-1: stay), the death signal, the parent's pid, then the command.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1

uid, gid, death_signal, parent = (int(value) for value in sys.argv[1:5])
if uid >= 0:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.platform == "linux":
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the process that asked for this program has ended")
os.execv(sys.argv[5], sys.argv[5:])
