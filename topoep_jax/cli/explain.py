"""`topoep explain`: one plan, told so that a person sees what it does and why; as text, and drawn with --png."""

from collections.abc import Iterator

import numpy as np

from topoep_jax.cli import study as studies
from topoep_jax.cli.copies import Copy
from topoep_jax.cli.flags import Flags
from topoep_jax.cli.output import check_writable, plural, table
from topoep_jax.cli.story import Story, tell
from topoep_jax.plan.reference import PLANNERS
from topoep_jax.plan.types import Status

_BAR = 30
_HOW_TO_READ = """
Copies, domain by domain
  domain wants   rows that the domain's ranks have for the expert
  copy runs      rows that the copy executes; otherwise the expert's owner, the rank it comes from, would
  MB saved       bytes between domains that the copy avoids (dispatch and combine), against {pull:.1f} MB of the pull;
                 negative: it runs other domains' rows; -: it comes from its own domain
  owner's load   without copies -> with them; 1 = the mean
  ms without it  change of the predicted time if this copy alone is removed and the owner runs its rows
  what grows     the part of the time that grows most then; copies without effect alone may matter together
"""


def define() -> Flags:
    """Flags of the command."""
    values = studies.define()
    values.add("skew", list, studies.SKEW, ["-4"])
    values.add("seed", int, "of the demand; of a trace, which sample", 0, least=0)
    values.add("planner", str, f"one of {', '.join(PLANNERS)}", "topoep")
    values.add("png", str, "draw to this file too")
    return values


def run(values: Flags) -> Iterator[str]:
    """What the command prints, piece by piece."""
    study = studies.from_flags(values)
    skews = studies.skews(values.skew)
    planner = studies.known("planner", values.planner, PLANNERS)
    if len(skews) > 1:
        raise ValueError(f"--skew={','.join(values.skew)} has {len(skews)} values: one plan is explained at a time")
    if study.num_samples is not None and values.seed >= study.num_samples:
        raise ValueError(f"--seed={values.seed}, but {values.trace} has samples 0..{study.num_samples - 1}")
    if values.png is not None:
        check_writable("png", values.png, ".png")
    (sample,) = study.samples(skews, [values.seed])
    story = tell(study, sample, planner)
    yield _head(story)
    yield _times(story)
    if story.after.num_replicas:
        yield _HOW_TO_READ.format(pull=story.problem.cost.expert_bytes / 1e6)
        for domain, copies in story.copies.items():
            yield _domain(story, domain, copies)
    yield _loads(story)
    yield _links(story)
    if values.png is not None:
        from topoep_jax.cli import draw

        draw.draw(story, values.png)
        yield f"\ndrawn to {values.png}\n"


def _head(story: Story) -> str:
    text = f"{story.title}\n{story.setting}\n{story.summary()}\n"
    cap = story.problem.cap_rows
    if cap is not None:
        met = "met" if Status.CAP_MET in story.after.status else "NOT met"
        text += f"cap of {cap:,} aligned rows on a rank: {met}, the fullest has {story.after.max_aligned_rows:,}\n"
    return text + "".join(f"{remark}\n" for remark in story.remarks)


def _times(story: Story) -> str:
    terms = story.terms()
    rows = [[cause, *(story.ms(ps) for ps in both)] for cause, both in terms.items()]
    rows.append(["sum", *(story.ms(sum(ps)) for ps in zip(*terms.values(), strict=True))])
    which = {"bottleneck": "each of the busiest rank", "eq8": "compute of the busiest rank, traffic of all"}
    title = f"predicted milliseconds, {which[story.problem.objective]}"
    note = "compute of forward and backward, traffic of the forward pass; the backward pass's counts as hidden\n"
    return f"\n{table([title, 'without copies', 'with copies'], rows)}{note}"


def _domain(story: Story, domain: int, copies: list[Copy]) -> str:
    """The copies that came into one domain."""
    topology = story.problem.topology
    ranks = list(topology.ranks_of_domain(domain))
    before, after = (plan.rank_load[ranks].sum() for plan in (story.before, story.after))
    text = (
        f"\nDomain {domain} (ranks {_ranges(ranks)}) executes {before:,} rows without copies and {after:,} with them;"
        f" {plural(len(copies), 'copy comes', 'copies come')} into it\n"
    )
    if not copies:
        return text
    rows = [
        [
            str(copy.expert),
            f"{copy.owner} (domain {topology.domain_of_rank[copy.owner]})" if copy.crosses else f"{copy.owner}",
            str(copy.holder),
            f"{copy.demand:,}",
            f"{copy.rows:,}",
            f"{round(copy.saved_bytes / 1e6, 1) + 0.0:.1f}" if copy.crosses else "-",
            f"{copy.owner_load[0]:.2f} -> {copy.owner_load[1]:.2f}",
            story.ms(copy.without_ps, "+") if copy.without_ps else "0",
            copy.reason,
        ]
        for copy in copies
    ]
    header = ["expert", "from rank", "to rank", "domain wants", "copy runs", "MB saved", "owner's load"]
    return text + table([*header, "ms without it", "what grows"], rows, left=2)


def _loads(story: Story) -> str:
    """Two bars per rank on one scale."""
    top = max(story.before.imbalance, story.after.imbalance, 1.0)
    mark = min(round(_BAR / top), _BAR - 1)

    def bar(load: float) -> str:
        cells = ["#" if i < round(_BAR * load / top) else " " for i in range(_BAR)]
        cells[mark] = "|"
        return "".join(cells)

    lines = [f"\nload of each rank, 1 = the mean, {story.mean_load:,.0f} rows ('|')\n"]
    lines.append(f"rank       {'without copies':<{_BAR + 7}}with copies\n")
    previous = None
    for rank, domain in enumerate(story.problem.topology.domain_of_rank):
        before, after = (plan.rank_load[rank] / story.mean_load for plan in (story.before, story.after))
        label = "" if domain == previous else f"d{domain}"
        previous = domain
        lines.append(f"{label:<5}{rank:>4}  {bar(before)} {before:4.2f}  {bar(after)} {after:4.2f}\n")
    return "".join(lines)


def _links(story: Story) -> str:
    """The ranks whose NICs move most."""
    if story.problem.topology.num_domains == 1:
        return ""
    rows = []
    before, after = story.nic_bytes()
    for direction, sides in (("sends", (before[0], after[0])), ("receives", (before[1], after[1]))):
        busiest = []
        for side in sides:
            order = np.argsort(-side, kind="stable")[:3]
            busiest.append(", ".join(f"rank {rank} {side[rank] / 1e6:.0f}" for rank in order))
        rows.append([direction, *busiest])
    header = ["busiest NICs, MB between domains, forward", "without copies", "with copies"]
    return "\n" + table(header, rows, left=3)


def _ranges(ranks: list[int]) -> str:
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return ", ".join(map(str, ranks))
