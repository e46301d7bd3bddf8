"""Why ggshard stopped: one class per kind of failure, each of which says where, what was found and what to do."""
from __future__ import annotations

from typing import Any, Optional


class GgshardError(Exception):
    """Any refusal of ggshard. ``str()`` gives the whole message in one line; the attributes give its parts."""

    file: Optional[str]
    """The file or folder concerned."""
    tensor: Optional[str]
    """The tensor, weight or parameter concerned."""
    key: Optional[str]
    """The metadata key, rule or manifest field concerned."""
    offset: Optional[int]
    """Byte offset in the file."""
    found: str
    """What was found."""
    expected: Optional[str]
    """What was expected instead."""
    remedy: Optional[str]
    """What can be done."""

    def __init__(
        self,
        message: str,
        file: Optional[str] = None,
        tensor: Optional[str] = None,
        key: Optional[str] = None,
        offset: Optional[int] = None,
        found: Optional[str] = None,
        expected: Optional[str] = None,
        remedy: Optional[str] = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor
        self.key = key
        self.offset = offset
        self.found = message if found is None else found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries: serving stacks start one process per rank.
        parts = (self.file, self.tensor, self.key, self.offset, self.found, self.expected, self.remedy)
        return type(self), (self.args[0], *parts), {"errno": self.errno} if isinstance(self, OSError) else None


class ContainerError(GgshardError):
    """The bytes are not a GGUF container as the format defines it."""


class TruncatedError(GgshardError):
    """A file ends before the bytes that its own header promises."""


class UnsupportedError(GgshardError):
    """A valid file of a kind that ggshard does not read."""


class SplitError(GgshardError):
    """The parts of a split set are incomplete or contradict each other."""


class RulesError(GgshardError):
    """A mapping or profile is malformed or contradicts itself."""


class NoMappingError(GgshardError):
    """No mapping, or more than one, fits the file."""


class MissingTensorError(GgshardError):
    """A weight that the model must have has no source tensor in the file."""


class UnknownTensorError(GgshardError):
    """A source tensor that no rule of the mapping uses or ignores."""


class ContradictionError(GgshardError):
    """Metadata and tensors of one file contradict each other."""


class LayoutError(GgshardError):
    """The model cannot be laid out as asked."""


class AuditError(GgshardError):
    """A plan failed its audit. This is a defect of ggshard; the plan is never executed."""


class NonfiniteError(GgshardError):
    """Decoded values are NaN or infinite, or overflow the output type."""


class OutputError(GgshardError):
    """The output folder cannot be used."""


class CheckpointError(GgshardError):
    """A written checkpoint is not what it claims to be, or not what the reader needs."""


class DeviceError(GgshardError):
    """A CUDA device that was asked for is not there, or failed."""


class IoError(GgshardError, OSError):
    """The operating system refused an operation; ``errno`` is its own number, where it gave one."""
