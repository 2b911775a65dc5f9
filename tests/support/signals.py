"""Child processes that heed Ctrl-C even where the tests themselves were started in the background or by nohup."""

from __future__ import annotations

import signal


def heeding_signals():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
