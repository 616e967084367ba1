"""The two kinds of error people meet: something they can put right, and something that must never happen."""

import errno


class UserError(ValueError):
    """Bad input. The message says what was wrong and what would be right; the command line exits with code 2."""


class NoRoomError(UserError):
    """The storage is full: nothing is wrong with what was asked, and it can go on once there is room."""


class SoundnessError(RuntimeError):
    """A certified sample was broken by an attack. Everything needed to reproduce it has been saved before this is raised."""


def storage_full(error: BaseException) -> bool:
    """Whether an error says that a disk or a quota is used up."""
    return isinstance(error, NoRoomError) or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT))


def nearest(name: str, valid: "list[str] | tuple[str, ...]") -> str:
    """' Did you mean X?' for the closest valid name, or the list of valid names."""
    import difflib

    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else f" Valid: {', '.join(valid)}."
