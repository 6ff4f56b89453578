"""Whether a function still runs, told from the stacks themselves.

An exception that another thread throws (`PyThreadState_SetAsyncExc`) can come before a function has
noted that it began, or after its last line: what it would have noted is then missing for good.
"""

from __future__ import annotations

import sys
from types import FrameType


def is_running(frame: FrameType) -> bool:
    """Whether a thread of this process runs `frame`, or what it called."""
    return any(called_from(frame, top) for top in sys._current_frames().values())


def called_from(frame: FrameType | None, top: FrameType | None) -> bool:
    """Whether `top` is `frame`, or was called from there."""
    while top and top is not frame:
        top = top.f_back
    return frame is not None and top is frame
