"""RECL of the members of a comparison, over contexts that all of them support. docs/recl.md"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longspan.data.cache import key
from longspan.errors import LongspanError
from longspan.experiments.compare.member import TrainedMember, out_of_memory
from longspan.experiments.contexts import LONGEST, SHARES, even_contexts
from longspan.scoring.contexts import Passage, Subject, choose_targets, measure
from longspan.scoring.recl import chance_gains, ecl, recl, recl_differences

Results = dict[str, dict[str, Any]]


def measure_contexts(
    members: Sequence[TrainedMember],
    contexts: Sequence[int] | None,
    targets: int | None,
    cached: Results,
    folder: Path | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """RECL and ECL of each group of members, and notes about them. Results are looked up in `cached` and added to it;
    `folder` gets the losses they were computed from, which `longspan recl --losses` reads.

    A group shares its tokens, since losses of different tokens cannot be compared. All of it is measured up to the
    shortest window, because a model without memory sees nothing beyond it. Members with memory are measured again up to
    the last context if that is further.
    """
    groups: dict[str, list[TrainedMember]] = {}
    for one in members:
        groups.setdefault(one.held_out.fingerprint, []).append(one)
    found: list[dict[str, Any]] = []
    notes = []
    if len(groups) > 1:
        parts = "; ".join(_names(group) for group in groups.values())
        notes.append(f"RECL is measured separately for members with different tokens: {parts}")
    for group in groups.values():
        windows = [one.loaded.model.reading.segment for one in group if not one.loaded.model.has_memory()]
        with_memory = [one for one in group if one.loaded.model.has_memory()]
        near, far = (_contexts(window, contexts, group) for window in (min(windows, default=None), None))
        if windows:
            limit = f"RECL of {_names(group)} is over contexts up to the shortest window, {min(windows)} tokens"
            _add(group, near, targets, cached, found, notes, limit, folder)
        if with_memory and not (windows and near == far):
            _add(with_memory, far, targets, cached, found, notes, "", folder)
    return found, notes


def _names(group: Sequence[TrainedMember]) -> str:
    return ", ".join(one.name for one in group)


def _contexts(window: int | None, contexts: Sequence[int] | None, group: Sequence[TrainedMember]) -> tuple[int, ...]:
    """The given contexts that fit the window; by default ten even steps up to the window, 1000 or half the text."""
    if contexts is not None:
        return tuple(context for context in contexts if window is None or context <= window)
    return even_contexts(min(LONGEST, len(group[0].held_out) // 2, window or LONGEST))


def _add(
    group: Sequence[TrainedMember],
    contexts: tuple[int, ...],
    targets: int | None,
    cached: Results,
    found: list[dict[str, Any]],
    notes: list[str],
    limit: str,
    folder: Path | None,
) -> None:
    """Add the result of one group to `found`, or the reason why there is none to `notes`."""
    if len(contexts) < 2:
        notes.append(f"RECL of {_names(group)} is not measured: a window or the held-out text is too short")
        return
    text = group[0].held_out
    try:
        positions = choose_targets(len(text), contexts[-1], targets)
        dtype = str(next(group[0].loaded.model.parameters()).dtype)
        models = [(one.name, one.loaded.hash, asdict(one.loaded.model.reading)) for one in group]
        name = key(models, dtype, text.fingerprint, contexts, len(positions))
        if name not in cached:
            file = None if folder is None else folder / f"losses-{name[:8]}.npz"
            cached[name] = _measure(group, Passage(text.ids, positions, text.fingerprint), contexts, file)
    except (LongspanError, MemoryError, RuntimeError) as error:
        if not isinstance(error, LongspanError) and not out_of_memory(error):
            raise
        reason = str(error) if isinstance(error, LongspanError) else "out of memory; use shorter contexts"
        notes.append(f"RECL of {_names(group)} is not measured: {reason}")
        return
    found.append(cached[name])
    notes.extend([limit] * bool(limit))
    notes.extend(cached[name]["notes"])


def _measure(
    group: Sequence[TrainedMember], passage: Passage, contexts: tuple[int, ...], file: Path | None
) -> dict[str, Any]:
    subjects = [Subject(one.name, one.loaded.model, one.loaded.hash) for one in group]
    table = measure(subjects, passage, contexts)
    if file is not None:
        table.save(file)
    lengths = {name: recl(table, share) for name, share in SHARES.items()}
    return {
        "members": list(table.names),
        "contexts": list(contexts),
        "targets": table.targets,
        "recl": {r: {name: asdict(length) for name, length in row.items()} for r, row in lengths.items()},
        "ecl": {name: asdict(length) for name, length in ecl(table).items()},
        "differences": {r: [asdict(d) for d in recl_differences(table, share)] for r, share in SHARES.items()},
        "notes": chance_gains(table, lengths.values()),
        "losses": None if file is None else file.name,
    }
