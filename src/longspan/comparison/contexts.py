"""RECL of a group, over what all of it can be given. docs/recl.md"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from longspan.comparison.member import Opened, out_of_memory
from longspan.data.cache import key
from longspan.errors import LongspanError
from longspan.evaluation.contexts import Passage, Subject, choose_targets, measure
from longspan.evaluation.recl import chance_gains, ecl, recl

SHARES = {"0.1": 0.1, "0.5": 0.5, "1.0": 1.0}
LONGEST, STEPS = 1000, 10


def measure_groups(
    opened: Sequence[Opened], contexts: Sequence[int] | None, targets: int | None, known: dict[str, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """What each group comes to, and what there is to say; `known` is looked up and added to.

    A group reads the same tokens: losses of other tokens cannot be compared. All of it is measured up to the shortest
    window, since without a memory nothing lies beyond; where that is not all, those with a memory further.
    """
    by_text: dict[str, list[Opened]] = {}
    for one in opened:
        by_text.setdefault(one.held_out.fingerprint, []).append(one)
    found: list[dict[str, Any]] = []
    notes = []
    if len(by_text) > 1:
        parts = "; ".join(", ".join(one.name for one in group) for group in by_text.values())
        notes.append(f"RECL is measured apart for members that read different tokens: {parts}")
    for group in by_text.values():
        windows = [one.loaded.model.config.segment for one in group if not one.loaded.model.has_memory]
        lasting = [one for one in group if one.loaded.model.has_memory]
        near, far = (_up_to(window, contexts, group) for window in (min(windows, default=None), None))
        if windows:
            told = f"RECL of {_listed(group)} is over contexts up to the shortest window, {min(windows)} tokens"
            _measured(group, near, targets, known, found, notes, told)
        if lasting and not (windows and near == far):
            _measured(lasting, far, targets, known, found, notes, "")
    return found, notes


def _listed(group: Sequence[Opened]) -> str:
    return ", ".join(one.name for one in group)


def _up_to(window: int | None, contexts: Sequence[int] | None, group: Sequence[Opened]) -> tuple[int, ...]:
    """The contexts asked for that a window holds; unless asked, ten even steps to it, to 1000 or to half the text."""
    if contexts is not None:
        return tuple(context for context in contexts if window is None or context <= window)
    step = min(LONGEST, len(group[0].held_out) // 2, window or LONGEST) // STEPS
    return tuple(range(step, step * STEPS + 1, step)) if step else ()


def _measured(
    group: Sequence[Opened],
    contexts: tuple[int, ...],
    targets: int | None,
    known: dict[str, dict[str, Any]],
    found: list[dict[str, Any]],
    notes: list[str],
    told: str,
) -> None:
    if len(contexts) < 2:
        notes.append(f"RECL of {_listed(group)} is not measured: a window or the held-out text is too short for it")
        return
    text = group[0].held_out
    try:
        places = choose_targets(len(text), contexts[-1], targets)
        dtype = str(next(group[0].loaded.model.parameters()).dtype)
        who = [(one.name, one.loaded.hash, asdict(one.loaded.model.config)) for one in group]
        page = key(who, dtype, text.fingerprint, contexts, len(places))
        if page not in known:
            subjects = [Subject(one.name, one.loaded.model, one.loaded.hash) for one in group]
            table = measure(subjects, Passage(text.ids, places, text.fingerprint), contexts)
            lengths = {name: recl(table, share) for name, share in SHARES.items()}
            known[page] = {
                "members": list(table.names),
                "contexts": list(contexts),
                "targets": table.targets,
                "recl": {r: {name: asdict(one) for name, one in row.items()} for r, row in lengths.items()},
                "ecl": {name: asdict(one) for name, one in ecl(table).items()},
                "notes": chance_gains(table, lengths.values()),
            }
    except (LongspanError, MemoryError, RuntimeError) as error:
        if not isinstance(error, LongspanError) and not out_of_memory(error):
            raise
        told = str(error) if isinstance(error, LongspanError) else "out of memory; give shorter --contexts"
        notes.append(f"RECL of {_listed(group)} is not measured: {told}")
        return
    found.append(known[page])
    notes.extend([told] * bool(told))
    notes.extend(known[page]["notes"])
