"""What happened to each block of a lookup, and why: the data path returns these, never raises."""

from __future__ import annotations

from enum import Enum


class Outcome(str, Enum):
    """How one block of a lookup was answered. The values are also metric labels."""

    NATIVE = "native"  # the target's own block
    DERIVED = "derived"  # converted earlier, stored, served again
    CONVERTED = "converted"  # converted from a sibling's block during this lookup
    DECLINED = "declined"  # a sibling had it; policy, gate or budget said no
    MISSED = "missed"  # nobody had it, or its bytes could not be trusted


SERVED = (Outcome.NATIVE, Outcome.DERIVED, Outcome.CONVERTED)


class Reason(str, Enum):
    """Why a block was declined or missed. Bounded: the values are also metric labels."""

    NONE = "none"
    # missed
    ABSENT = "absent"
    AFTER_GAP = "after_gap"  # present, but an earlier block of the prefix is not
    CORRUPT = "corrupt"
    STORE_ERROR = "store_error"
    SHAPE_MISMATCH = "shape_mismatch"
    ATTACHING = "attaching"  # the engine's model is still being read
    NOT_STORED = "not_stored"  # nothing is stored for this engine; its log says why
    # declined
    MAPPER = "mapper"  # the pair's mapper cannot be read
    DISABLED = "disabled"
    GATE_MISSING = "gate_missing"
    GATE_REJECTED = "gate_rejected"
    GATE_OUTDATED = "gate_outdated"  # accepted by an earlier check, which asked for less
    GATE_DTYPE = "gate_dtype"
    FINGERPRINT = "fingerprint"
    MIN_TOKENS = "min_tokens"
    HOLD_BACK = "hold_back"
    MAX_PREFIX = "max_prefix"
    BEYOND_CHECKED = "beyond_checked"  # much longer than any prefix the gate has measured
    POSITION_UNKNOWN = "position_unknown"
    NOT_WORTH_IT = "not_worth_it"
    BUDGET = "budget"
    UNSUPPORTED = "unsupported"
    CONVERSION_ERROR = "conversion_error"
    SAMPLED = "sampled"  # left to the engine, to compare its blocks with converted ones
    RETENTION = "retention"  # switched off: the comparison says the pair keeps too little
