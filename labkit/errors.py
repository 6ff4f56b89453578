"""Every error that labkit raises on purpose.

A message says what is wrong, where (file, tensor, offset) and what to do, in words that a student
understands. The classes exist so that a caller can tell kinds apart, not to carry data.
"""

from __future__ import annotations


class LabkitError(Exception):
    """Base of all errors of labkit."""


class ModelFileError(LabkitError):
    """A model file cannot be used as it is: wrong kind, damaged, or against the GGUF rules."""


class NotAModelError(ModelFileError):
    """The path is no GGUF model: an LFS pointer, an empty file, another format, a directory."""


class MissingShardError(ModelFileError):
    """A file of a split model is not there."""


class TruncatedFileError(ModelFileError):
    """The file ends before the data that its header declares."""


class NotMoEError(ModelFileError):
    """The model has no routed experts, so there is nothing to stream."""


class StreamingRefusedError(LabkitError):
    """The model is a MoE, but something about it keeps labkit from streaming it losslessly."""


class BudgetError(LabkitError):
    """A memory budget that cannot work."""


class OptionError(LabkitError, ValueError):
    """A value that an option cannot take."""


class ResourceError(LabkitError):
    """The system refuses what a session needs besides memory: a thread, a descriptor."""


class SeamError(LabkitError):
    """The installed llama.cpp does not look as labkit's ctypes seam expects."""


class LlamaError(LabkitError):
    """llama.cpp refused or failed; the message holds the reason from its log."""


class ReadError(LabkitError):
    """Reading expert bytes failed; no token was computed from unread bytes."""


class SessionError(LabkitError):
    """A session is used in a way that cannot work: closed, busy, or out of context."""


class MetricsError(LabkitError):
    """A file of per-token figures cannot be read or written."""


class BenchError(LabkitError):
    """A benchmark that cannot be run as asked, or whose saved tables cannot be read."""


class TraceError(LabkitError):
    """A routing trace cannot be read or does not belong to the model."""


class DeviceError(LabkitError):
    """A device profile cannot be used: a figure is missing, absurd, or without a source."""


class SheetError(LabkitError):
    """A model sheet cannot be made from what was given, or cannot tell what was asked."""


class PlanError(LabkitError):
    """A plan cannot be made from what was given."""


class NotebookError(LabkitError):
    """A notebook run failed: a cell raised, or its kernel died."""


class ParameterError(NotebookError):
    """A parameter that the notebook does not declare, or a value that it cannot take."""


class CellFailedError(NotebookError):
    """A cell of a notebook raised."""


class KernelDiedError(NotebookError):
    """The kernel of a notebook ended while a cell ran: killed, out of memory, or crashed."""
