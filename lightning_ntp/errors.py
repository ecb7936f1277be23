"""Every exception that this package raises on purpose.

    NTPError
    +-- ConfigError (also a ValueError)            a setting that cannot work; raised before any process waits for another
    +-- UnsupportedModelError (also a ValueError)  a model or layer that cannot be cut; names the module and its style
    +-- UnsupportedOpError (also a NotImplementedError)  an operator on an unevenly cut tensor that has no rule
    +-- PlanMismatchError                          two workers disagree about what moves or in which order
    +-- RankLostError                              a peer is gone; the recovery decides what happens next
    +-- PoisonBatchError                           a step that kills one worker after the other; names its samples
    +-- UnrecoverableError                         state is lost for good; names the parameter and what would have saved it
        +-- SilentCorruptionError                  copies of state differ, and no majority tells which is right

Messages say what happened, where, what was found, what was wanted and what to do about it.
"""

from __future__ import annotations


class NTPError(Exception):
    """Base class: ``except NTPError`` catches whatever this package raises on purpose."""


class ConfigError(NTPError, ValueError):
    """A setting, size or combination of settings that cannot work."""


class UnsupportedModelError(NTPError, ValueError):
    """A model, layer or optimizer that cannot be cut unevenly (yet)."""


class UnsupportedOpError(NTPError, NotImplementedError):
    """An operator that has no rule for an unevenly cut tensor. Names the operator, the placement and the way out."""


class PlanMismatchError(NTPError):
    """Workers disagree about a plan, a layout or the order of buckets. Nothing has been updated."""


class RankLostError(NTPError):
    """A worker of this generation is gone or does not answer."""


class PoisonBatchError(NTPError):
    """A step has cost a second worker in the same way: going on would cost them all."""


class UnrecoverableError(NTPError):
    """No live holder, buddy copy or checkpoint has a piece of state that is needed."""


class SilentCorruptionError(UnrecoverableError):
    """Holders of the same elements have different bits, and there are too few of them to tell who is right."""
