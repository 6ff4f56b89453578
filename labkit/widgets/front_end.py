"""Whether whoever runs this kernel can draw a widget."""

from __future__ import annotations

import os
import re

#: Set to 1 or 0 to say it outright (Voilà draws widgets, but runs notebooks as nbclient does).
OVERRIDE = "LABKIT_WIDGETS"

#: Message ids of jupyter_client, the Python client: session id (hex), process id, counter.
_PYTHON_CLIENT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{20,32}_\d+_\d+")


def draws_widgets() -> bool:
    """Return True in JupyterLab, Notebook, VS Code and Colab; False in a headless run or console.

    Clients written in Python (nbclient and so papermill and nbconvert, the console, Qt) never draw
    widgets, and they number their messages in their own way; pages use other ids. A notebook saved
    by a headless run must hold the picture alone: a converter that sees a widget in it prefers the
    widget, which then needs scripts from a network to show anything.
    """
    said = os.environ.get(OVERRIDE)
    if said is not None:
        return said not in ("", "0")
    return _draws_widgets(_parent_message_id())


def _draws_widgets(message_id: str | None) -> bool:
    return message_id is not None and not _PYTHON_CLIENT.fullmatch(message_id)


def _parent_message_id() -> str | None:
    """Return the id of the request that the kernel is answering; None outside a kernel."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return None
    return kernel.get_parent().get("header", {}).get("msg_id")
