"""What differs between two runs, and which comparisons that makes void.

Belongs here: the three grounds on which a comparison is void, and the table of all that differs. Does not belong here:
figures.

Another model voids everything but standing side by side. Other data voids pairing by sample: intervals, tests and
texts. Another scorer voids the pairing of answers. Other hardware voids the difference in speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.records import DataIdentity, ModelIdentity, RunRecord
from specbench.reports.compared_run import ComparedRun, flatten
from specbench.reports.number_format import NOT_MEASURED
from specbench.reports.table import ReportTable, text_cell

#: Entries of `hardware` that change while a run goes on: the report of a run shows them.
_STATES = ("at_start", "at_end")
#: Entries of `hardware` that are software: shown when they differ, but no ground to void anything.
_SOFTWARE = ("system", "driver")


@dataclass(frozen=True, slots=True)
class Comparability:
    """Grounds on which comparing a run with the base is void; None where there is no such ground."""

    model: str | None
    #: Other samples were asked.
    data: str | None
    scorer: str | None
    hardware: str | None

    @property
    def is_paired(self) -> bool:
        """Whether sample i of one run is sample i of the other."""
        return self.model is None and self.data is None

    @property
    def has_paired_answers(self) -> bool:
        return self.is_paired and self.scorer is None

    @property
    def void_of_speed(self) -> str | None:
        """Why a difference in speed says nothing."""
        return self.model or self.hardware

    def sentences(self, label: str) -> list[str]:
        """A line for each ground: what differs, and what is void for it."""
        lines = []
        if self.model:
            lines.append(
                f"**{label}: the models differ** ({self.model}). Everything but standing side by side is void: no "
                "difference, interval, test or comparison of texts."
            )
        if self.data:
            lines.append(
                f"**{label}: the samples differ** ({self.data}). Pairing is void: figures stand side by side unpaired, "
                "without interval, mark or comparison of texts."
            )
        if self.scorer:
            lines.append(
                f"**{label}: the scorers differ** ({self.scorer}). Pairing of answers is void: no flips, no mark."
            )
        if self.hardware:
            lines.append(f"**{label}: the hardware differs** ({self.hardware}). Differences in speed are void.")
        return lines


def comparability(base: ComparedRun, new: ComparedRun) -> Comparability:
    """Judge `new` against `base`."""
    return Comparability(
        model=_model_difference(base.record.model, new.record.model),
        data=_data_difference(base, new),
        scorer=_changed("scorer", *(run.record.config["eval"]["scorer"] for run in (base, new))),
        hardware=_hardware_difference(base.record, new.record),
    )


def only_layout_differs(base: ComparedRun, new: ComparedRun) -> bool:
    """Whether the two runs differ in their parallel layout and in no other setting."""
    differing = _differing(base.settings, new.settings)
    return bool(differing) and all(key.startswith("parallel.") for key in differing)


def differences_table(runs: Sequence[ComparedRun]) -> ReportTable:
    """All that differs between any two of the runs: settings, code, packages, model, data, hardware."""
    described = [_described(run) for run in runs]
    rows = [
        (text_cell(f"{part} {name}".strip()), *(text_cell(one[part].get(name, NOT_MEASURED)) for one in described))
        for part in described[0]
        for name in dict.fromkeys(name for one in described for name in one[part])
        if len({one[part].get(name, NOT_MEASURED) for one in described}) > 1
    ]
    notes = () if rows else ("Nothing: settings, code, packages, model, data and hardware are the same.",)
    return ReportTable(
        name="what_differs",
        title="What differs between the runs",
        header=("", *(run.label for run in runs)),
        rows=tuple(rows),
        num_text_columns=1 + len(runs),
        notes=notes,
    )


def _model_difference(base: ModelIdentity, new: ModelIdentity) -> str | None:
    """By the hash of the checkpoint where both have one, else by name, and by revision where both have one."""
    if base.sha256 and new.sha256:
        if base.sha256 == new.sha256:
            return None
        names = base.ran if base.ran == new.ran else f"{base.ran} and {new.ran}"
        return f"{names}: sha256 {base.sha256[:12]} and {new.sha256[:12]}"
    return _other_name("model", (base.ran, base.revision), (new.ran, new.revision))


def _data_difference(base: ComparedRun, new: ComparedRun) -> str | None:
    """By its hash or else its name, as a model's; then by which samples were asked."""
    first, second = base.record.data, new.record.data
    if first.sha256 and second.sha256:
        if first.sha256 != second.sha256:
            return f"{_both(first.name, second.name)}: sha256 {first.sha256[:12]} and {second.sha256[:12]}"
    elif found := _other_name("data", (first.name, first.revision), (second.name, second.revision)):
        return found
    base_ids, new_ids = _sample_ids(base), _sample_ids(new)
    if base_ids == new_ids:
        return None
    shared = len(base_ids & new_ids)
    return f"{len(base_ids)} and {len(new_ids)} samples, {shared} of them in both"


def _sample_ids(run: ComparedRun) -> set[str]:
    return {request.sample_id for request in run.columns.requests}


def _other_name(what: str, base: tuple[str, str | None], new: tuple[str, str | None]) -> str | None:
    """A revision that only one of them has says nothing."""
    if None in (base[1], new[1]):
        return _changed(what, base[0], new[0])
    return _changed(what, f"{base[0]} at {base[1]}", f"{new[0]} at {new[1]}")


def _hardware_difference(base: RunRecord, new: RunRecord) -> str | None:
    """The first few differing entries of the hardware, and the device that the engine ran on."""
    first, second = _hardware(base), _hardware(new)
    differing = _differing(first, second)
    found = [f"{key}: {first.get(key, NOT_MEASURED)} and {second.get(key, NOT_MEASURED)}" for key in differing]
    if not found:
        return None
    rest = len(found) - 3
    return "; ".join([*found[:3], *([f"and {rest} more"] if rest > 0 else [])])


def _hardware(record: RunRecord) -> dict[str, str]:
    """Name -> text. Memory in whole GiB, since a kernel keeps a little more or less of it for itself."""
    flat = {key: value for key, value in record.hardware.items() if key not in (*_STATES, *_SOFTWARE, "gpus")}
    if flat.get("memory_bytes") is not None:
        flat["memory_gib"] = round(flat.pop("memory_bytes") / 2**30)
    gpus = [
        ", ".join(str(value) for key, value in gpu.items() if key not in _SOFTWARE)
        for gpu in record.hardware.get("gpus", [])
    ]
    device = record.config.get("engine", {}).get("device", "").partition(":")[0]
    return {key: _text(value) for key, value in flatten(flat).items()} | {
        "gpus": _text(gpus),
        "device": _text(device or None),
    }


def _software(record: RunRecord) -> dict[str, str]:
    """The system's kernel and the driver of the GPUs."""
    drivers = dict.fromkeys(str(gpu["driver"]) for gpu in record.hardware.get("gpus", []) if "driver" in gpu)
    return {"system": _text(record.hardware.get("system")), "driver": _text(list(drivers))}


def _differing(first: dict, second: dict) -> list[str]:
    """Keys whose values are not equal, or that only one has."""
    keys = dict.fromkeys([*first, *second])
    return [key for key in keys if first.get(key, NOT_MEASURED) != second.get(key, NOT_MEASURED)]


def _changed(what: str, base: str | None, new: str | None) -> str | None:
    return None if base == new else f"{what} {base} and {new}"


def _both(first: str, second: str) -> str:
    return first if first == second else f"{first} and {second}"


def _described(run: ComparedRun) -> dict[str, dict[str, str]]:
    """Part -> name -> text of all that may differ. A path is named only where there is no hash of the content."""
    record = run.record
    changes = "" if record.is_dirty is None else " with changes" if record.is_dirty else ""
    return {
        "Setting": {key: _text(value) for key, value in run.settings.items()},
        "": {
            "specbench": f"{record.version}, commit {record.commit or NOT_MEASURED}{changes}",
            "Model": f"{record.model.ran}, {_content(record.model)}",
            "Data": f"{record.data.name}, {_content(record.data)}",
            "Status": record.status,
            "Segments": str(record.num_segments),
            "Acceptance source": record.acceptance_source,
            "Other processes (cores)": _busy(record),
        },
        "Package": record.packages,
        "Hardware": _hardware(record),
        "Software": _software(record),
    }


def _content(identity: ModelIdentity | DataIdentity) -> str:
    if identity.sha256:
        return f"sha256 {identity.sha256[:12]}"
    return f"revision {identity.revision}" if identity.revision else identity.path or NOT_MEASURED


def _busy(record: RunRecord) -> str:
    """Other processes that used the machine while the run went on."""
    if "at_end" not in record.hardware:
        return NOT_MEASURED
    heavy = record.hardware["at_end"].get("other_processes", [])
    return ", ".join(f"{one['name']} {one['cores']}" for one in heavy) or "none"


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
