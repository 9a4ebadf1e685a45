# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""What compression did: bytes, ratio and error together, time by stage, and every fallback with its reason."""

from collections import Counter


def _bytes(count):
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


_OTHER_PACE = 0.03  # a pace further from 1 is told, as in auto's own line


def _prediction_lines(decision):
    """What a step was predicted to take, against what it took on trial and takes now."""
    chosen = decision["candidates"][decision["chosen"]] if decision["candidates"] else {"predicted_ns": None}
    predicted = chosen["predicted_ns"]
    if not decision["decided"] or not predicted:
        return []
    at_pace = chosen["predicted_at_pace_ns"] if abs((chosen["pace"] or 1) - 1) > _OTHER_PACE else None
    measured = {"on trial": (chosen["measured_ns"], at_pace), "in the last comparison": (decision["step_ns"], None)}
    shown = []
    for when, (ns, ns_at_pace) in measured.items():
        if ns is not None:
            at_speed = f"; {ns_at_pace / ns - 1:+.0%} at the machine's speed then" if ns_at_pace else ""
            shown.append(f"{ns / 1e6:.1f} ms {when} ({predicted / ns - 1:+.0%}{at_speed})")
    return [f"  a step          predicted {predicted / 1e6:.1f} ms, measured {', '.join(shown)}"]


class Report:
    """A snapshot of one rank's counters. ``str()`` is a table, ``to_dict()`` all of it.

    Keys of the dict: ``bytes_per_step`` (payload of this rank's last step), ``dense_bytes_per_step`` (its gradients),
    ``ratio`` (dense over payload), ``relative_error`` (relative L2, of this rank's own reconstruction in the last
    compressed step), ``messages_per_step``, ``time_by_stage_ns`` (sums over all steps), ``memory_bytes``, ``tensors``,
    ``fallbacks``, ``steps``, ``passed_steps`` (of them by DDP itself: only their number is known),
    ``non_finite_steps``, ``last_non_finite``, ``hook_ns`` (this rank's thread in the hook), ``device_wait_ns`` (part of
    it: until gradients had come from their device; 0 on the CPU), ``runs_on`` (device of the ``gradients``; whether the
    ``engine`` is on the "cpu" or that "device"; where it is not, the ``reason``),
    ``auto`` (what auto decided, as decision() of a state has it; else None), ``hook_stays`` (why DDP keeps the hook
    where auto runs dense, or empty).
    """

    def __init__(self, values):
        self._values = values

    def to_dict(self):
        return self._values

    def __str__(self):
        v = self._values
        steps = max(v["steps"] - v["passed_steps"], 1)
        how = f"in {v['messages_per_step']} messages" if v["messages_per_step"] or not v["passed_steps"] else "by DDP"
        lines = [
            f"cortado: {v['spec']} over {v['communicator']}, world size {v['world_size']}, {v['steps']} steps",
            f"  sent a step     {_bytes(v['bytes_per_step'])} instead of {_bytes(v['dense_bytes_per_step'])} {how}",
            f"  ratio           {v['ratio']:.1f} at relative L2 error {v['relative_error']:.3f} (last step, this rank)",
        ]
        stages = v["time_by_stage_ns"]
        shown = [f"{name} {ns / steps / 1e6:.2f}" for name, ns in stages.items() if name != "communicate"]
        lines.append(
            f"  ms a step       {', '.join(shown)}; collectives under way {stages['communicate'] / steps / 1e6:.2f}"
        )
        if v["device_wait_ns"]:
            lines.append(
                f"  device          {v['device_wait_ns'] / steps / 1e6:.2f} ms a step until all gradients had come"
            )
        place = v["runs_on"]
        if "reason" in place:
            lines.append(f"  compressed on   the CPU, copied from {place['gradients']}: {place['reason']}")
        elif place["engine"] == "device":
            lines.append(f"  compressed on   {place['gradients']}")
        memory = v["memory_bytes"]
        lines.append(
            f"  memory          residual {_bytes(memory['residual'])}, factors {_bytes(memory['factors'])},"
            f" messages {_bytes(memory['messages'])}"
        )
        if v["non_finite_steps"]:
            lines.append(f"  non-finite      {v['non_finite_steps']} steps undone; the last: {v['last_non_finite']}")
        if v["auto"] is not None:
            lines.append(f"  auto            {v['auto']['reason']}")
            lines += _prediction_lines(v["auto"])
            if v["hook_stays"] and v["auto"]["decided"] and v["auto"]["chosen"] == 0:
                lines.append(f"  hook            stays, and DDP does not exchange by itself: {v['hook_stays']}")
        lines += self._fallback_lines()
        return "\n".join(lines)

    def _fallback_lines(self):
        tensors = Counter(f["reason"] for f in self._values["fallbacks"] if f["tensor"])
        lines = [f"  dense           {count} tensors: {reason}" for reason, count in tensors.most_common()]
        if self._values["passed_steps"]:
            lines.append(f"  without cortado {self._values['passed_steps']} steps, dense: exchanged by DDP itself")
        for fallback in self._values["fallbacks"]:
            if not fallback["tensor"]:
                lines.append(f"  fallback        {fallback['steps']} steps: {fallback['reason']}")
        return lines


class KfacReport:
    """A snapshot of one rank's K-FAC counters. ``str()`` is a table, ``to_dict()`` all of it.

    Keys of the dict: ``traffic`` by kind of message (factors, inverses, gradients, reduced_gradients: ``messages`` so
    far, and of the last one ``collectives``, ``payload_bytes``, ``dense_bytes``, ``relative_error`` of what this rank
    sent), ``time_by_stage_ns`` and ``step_ns`` (sums over all steps), ``fallbacks``, ``skipped``, ``strategy``,
    ``compression``, ``factor_compression``, ``world_size``, ``steps``, ``non_finite_steps``, ``runs_on`` ("cpu", or
    "device" where it computes on that of the model), and ``auto``: where the codec is "auto", by kind of message
    ``codec``, ``aggregate``, ``reason``, and the times of a message ``predicted_ns``, ``predicted_uncompressed_ns``,
    ``measured_ns``, ``measured_uncompressed_ns`` (0: not known; with compression those of the candidate that is
    predicted to be the fastest, taken or not).
    """

    def __init__(self, values):
        self._values = values

    def to_dict(self):
        return self._values

    def __str__(self):
        v = self._values
        steps = max(v["steps"], 1)
        lines = [f"cortado: K-FAC, {v['strategy']}, world size {v['world_size']}, {v['steps']} steps"]
        for kind, t in v["traffic"].items():
            if not t["payload_bytes"]:
                continue
            ratio = t["dense_bytes"] / t["payload_bytes"]
            lines.append(
                f"  {kind.replace('_', ' '):<17} {_bytes(t['payload_bytes'])} instead of {_bytes(t['dense_bytes'])},"
                f" ratio {ratio:.1f} at relative L2 error {t['relative_error']:.3f}"
                f" (last of {t['messages']}, this rank)"
            )
        for kind, choice in v["auto"].items():
            lines.append(f"  auto, {kind:<11} {choice['reason'] or 'no message yet'}")
        stages = [
            f"{name.replace('_', ' ')} {ns / steps / 1e6:.2f}" for name, ns in v["time_by_stage_ns"].items() if ns
        ]
        lines.append(f"  ms a step         {', '.join(stages)}")
        if v["non_finite_steps"]:
            lines.append(f"  non-finite        {v['non_finite_steps']} steps without preconditioning")
        for fallback in v["fallbacks"]:
            layer = f"{fallback['layer']}: " if fallback["layer"] else ""
            lines.append(f"  {fallback['count']} times {layer}{fallback['reason']}")
        return "\n".join(lines)
