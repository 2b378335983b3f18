"""A simulated step in the Chrome trace format, which ui.perfetto.dev and chrome://tracing load.

Format: "Trace Event Format" of the Catapult project, complete events ("X") and metadata ("M"). A process is a rank, a
thread a stream.
"""

from typing import Any

from topoep_jax.simulate.program import STREAMS
from topoep_jax.simulate.timeline import Timeline


def chrome_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """The JSON object of a trace; times in microseconds, to the nanosecond.

    Args:
      timeline: the step.
      title: what is shown, for `otherData`.
    """
    topology = timeline.links.topology
    events: list[dict[str, Any]] = []
    for rank, domain in enumerate(topology.domain_of_rank):
        events.append(_named("process_name", rank, 0, f"rank {rank} (domain {domain})"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        events += [_named("thread_name", rank, tid, stream) for tid, stream in _threads(timeline)]
    threads = {stream: tid for tid, stream in enumerate(STREAMS)} if timeline.overlap else dict.fromkeys(STREAMS, 0)
    for event in timeline.events():
        begin, end = round(event.begin_ps / 1000), round(event.end_ps / 1000)
        if end == begin:
            continue
        moved = {"sent_bytes": event.sent_bytes, "received_bytes": event.received_bytes}
        events.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.phase,
                "pid": event.rank,
                "tid": threads[event.stream],
                "ts": begin / 1000,
                "dur": (end - begin) / 1000,
                "args": moved if event.sent_bytes or event.received_bytes else {},
            }
        )
    about = {"title": title, "kind": "simulated: modelled times, nothing was measured"}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _threads(timeline: Timeline) -> list[tuple[int, str]]:
    return list(enumerate(STREAMS)) if timeline.overlap else [(0, "the only stream")]


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
