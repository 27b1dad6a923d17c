"""Exhibits that map the speedup of a method over latency, bandwidth and number of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.exhibits.base import Basis, ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import palette
from scripts.exhibits.charts.curves import Fields, draw_fields
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds.counts import Cycle
from scripts.exhibits.kinds.gpu import MODELS, Model, basis_of, measured_models
from scripts.exhibits.kinds.updates import Contender, Parts, cycle_of, predict
from scripts.exhibits.outcomes import failed
from scripts.exhibits.passes import MeasuredPasses
from scripts.exhibits.tables import Cell, Row, Table
from spardl.clusters.network import PRESETS, Network

BASIS = Basis(
    simulated="seconds of messages: counted rounds and bytes on a modelled network, one after the other",
    measured="rounds, and bytes on the longest path, counted in synchronizations of random gradients (a common part "
    "and noise, equally strong)",
    assumed="what each model and each compressor takes on an RTX 2080 Ti (scripts/exhibits/kinds/gpu.py), that nothing "
    "overlaps, and that bytes grow in proportion to the model; latency and bandwidth of the published settings, as we "
    "do not know them",
)
WORD = 4  # bytes, where formulas count words
# Range of latencies, as shares of the transfer time of the gradient's bytes, and number of values per factor of ten.
FROM, TO, STEPS = 1e-6, 10.0, 50
# A network with bandwidth only, and one with latency only.
ONE_GBIT = Network(alpha=0, gbit=1)
LIMITS = (ONE_GBIT, Network(alpha=1, gbit=math.inf))
# Parts of an update with speedups, and their names.
PARTS: Mapping[str, str] = MappingProxyType({"communication": "messages", "total": "updates"})
BY_FORMULAS = ", by formulas"
REACH = ("over", "where only bandwidth counts", "where only latency counts")


class Formula(NamedTuple):
    """Published costs of a synchronization.

    Attributes:
        rounds: Number of successive messages.
        words: Words sent per worker and entry of the gradient.
    """

    rounds: float
    words: float

    @property
    def cycle(self) -> Cycle:
        """Converts the formula to the format of counts: equal steps, four bytes per word."""
        words, sent = ({"fixed": 0.0, "per_entry": size * self.words} for size in (1, WORD))
        return [{"share": 1.0, "rounds": self.rounds, "words": words, "bytes": sent}]


class Side(NamedTuple):
    """One of the compared methods.

    Attributes:
        choice: Choice of ``compressor=``.
        cycle: Costs of its steps.
    """

    choice: str
    cycle: Cycle


@dataclass(frozen=True)
class Costs:
    """Costs of the methods, from which all figures are computed.

    Attributes:
        ours: Variants of our method by name; the fastest one counts.
        rivals: Other methods by name.
        workers: Number of workers (P).
        models: Models by key of ``gpu.MODELS``.
    """

    ours: Mapping[str, Side]
    rivals: Mapping[str, Side]
    workers: int
    models: Mapping[str, Model] = field(default_factory=lambda: MODELS)

    def seconds(self, side: Side, part: str, model: str, network: Network) -> float:
        """Seconds of an update or of a part of it.

        Args:
            side: Method to evaluate.
            part: Name of an attribute of :class:`Ranges`.
            model: Key of ``gpu.MODELS``.
            network: Network of the messages.
        """
        found: Parts = predict(self.models[model], side.choice, side.cycle, self.workers, network)
        return float(getattr(found, part))

    def gain(self, rival: str, part: str, model: str, network: Network) -> float:
        """Speedup of our fastest variant over a rival; arguments as in :meth:`seconds`."""
        ours = min(self.seconds(side, part, model, network) for side in self.ours.values())
        return self.seconds(self.rivals[rival], part, model, network) / ours

    def strongest(self, part: str, model: str, network: Network) -> str:
        """Fastest rival that sends single entries; arguments as in :meth:`seconds`."""
        sparse = [name for name, side in self.rivals.items() if side.choice != "none"]
        return min(sparse, key=lambda name: self.seconds(self.rivals[name], part, model, network))


def reached(wanted: float, gains: Sequence[tuple[float, float]], show: Callable[[float], str]) -> str:
    """Describes where gains reach a wanted value.

    Args:
        wanted: Wanted gain.
        gains: Pairs of position and gain, in the order of increasing positions.
        show: Function that formats a position.
    """
    first, last = gains[0][0], gains[-1][0]
    runs = [list(run) for enough, run in groupby(gains, lambda each: each[1] >= wanted) if enough]
    told = [_between(run[0][0], run[-1][0], first, last, show) for run in runs]
    return ", and ".join(told) or "nowhere"


def _between(low: float, high: float, first: float, last: float, show: Callable[[float], str]) -> str:
    start = f"from {show(low)} on" if low > first else ""
    stop = f"up to {show(high)}" if high < last else ""
    return " ".join(filter(None, (start, stop))) or "everywhere"


def _short(seconds: float) -> str:
    """Formats a latency with its unit."""
    return f"{1e6 * seconds:.3g} µs" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


@dataclass(frozen=True)
class Regimes(Exhibit):
    """One method against several others with one number of workers, on all networks.

    Attributes:
        methods: Counted methods by name; those named after ``ours`` are variants, of which the fastest counts.
        formulas: Known published formulas by name of the method.
        ours: Prefix of the names of our variants.
        rival: Rival of the claim.
        dense: Dense baseline.
        claimed: Published speedup.
        workers: Number of workers (P).
        density: Density of the sent entries.
        kept: Entries sent of the larger counted gradient, by size preset.
        models: Models with a map, by number of parameters.
        latencies: Latencies of the rows of a map in seconds.
        bandwidths: Bandwidths of the columns of a map in Gbit/s.
        settings: Published models and presets of networks, which have a frame in the maps.
        sizes: Costs of the models by key of ``gpu.MODELS``.
    """

    methods: Mapping[str, Contender]
    formulas: Mapping[str, Formula]
    ours: str
    rival: str
    dense: str
    claimed: float
    workers: int
    density: float
    kept: ByScale[int]
    models: tuple[str, ...]
    latencies: tuple[float, ...]
    bandwidths: tuple[float, ...]
    settings: tuple[tuple[str, str], ...]
    basis: Basis = field(default=BASIS, kw_only=True)
    sizes: Mapping[str, Model] = field(default_factory=lambda: MODELS)

    def assumes(self, scale: str) -> Sequence[str]:
        del scale
        return [name for name in self._shown if not self.sizes[name].measured]

    @property
    def _shown(self) -> Sequence[str]:
        return list(dict.fromkeys((*self.models, *(model for model, _ in self.settings))))

    def with_passes(self, given: Mapping[str, MeasuredPasses]) -> Regimes:
        own = {name: passes for name, passes in given.items() if name in self._shown}
        return replace(self, sizes=measured_models(self.sizes, own), basis=basis_of(self.basis, own))

    def job(self, scale: str, method: str) -> Computation:
        """Job that counts one method."""
        return cycle_of(self.name, self.methods[method], self.workers, self.density, at(scale, self.kept))

    def jobs(self, scale: str) -> Sequence[Computation]:
        return [self.job(scale, method) for method in self.methods]

    def cost(self, scale: str) -> str:
        return f"{len(self.methods)} counts, a minute; those of spardl.breakdown at the scales laptop and paper"

    def caption(self, scale: str) -> str:
        return (
            f"{self.workers} workers, density {self.density}; {self.ours} with the better of its numbers of teams at "
            "every place. How much faster messages are depends, apart from a few counts in messages, on one ratio: "
            "latency over the seconds that the gradient, at four bytes an entry, takes on a link. By formulas: rounds "
            f"and words that papers state, at the end of each range that favours {self.ours}, four bytes a word. What "
            "papers measured includes what their code costs; nothing here does."
        )

    def costs(self, scale: str, results: Results) -> Costs | None:
        """Counted costs; ``None`` if some jobs failed."""
        found = {method: results.of(self.job(scale, method)) for method in self.methods}
        if any(outcome.reason is not None for outcome in found.values()):
            return None
        return self._sides({method: outcome.data["kinds"] for method, outcome in found.items()})

    @property
    def stated(self) -> Costs:
        """Costs by the published formulas."""
        return self._sides({name: formula.cycle for name, formula in self.formulas.items()})

    def _sides(self, cycles: Mapping[str, Cycle]) -> Costs:
        sides = {name: Side(self.methods[name].choice, cycle) for name, cycle in cycles.items()}
        ours = {name: side for name, side in sides.items() if name.startswith(self.ours)}
        return Costs(ours, {name: side for name, side in sides.items() if name not in ours}, self.workers, self.sizes)

    def _compared(self, costs: Costs) -> Iterator[tuple[str, Costs, str]]:
        """Name, costs and rival of all comparisons."""
        for rival in costs.rivals:
            yield rival, costs, rival
            if rival in self.stated.rivals:
                yield f"{rival}{BY_FORMULAS}", self.stated, rival

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        costs = self.costs(scale, results)
        if costs is None:
            lost = [(method, results.of(self.job(scale, method))) for method in self.methods]
            rows = [
                Row(method, failed([outcome], 1), [self.job(scale, method)])
                for method, outcome in lost
                if outcome.reason is not None
            ]
            return [Table(f"{self.title}: not counted", ("method", "result"), rows)]
        jobs = self.jobs(scale)
        return [self._reach(costs, jobs), self._published(costs, jobs)]

    def _reach(self, costs: Costs, jobs: Sequence[Computation]) -> Table:
        wanted, largest = f"{self.claimed:g}x", MODELS[self.models[-1]].title
        columns = (
            *REACH,
            f"{wanted}: latency over the gradient's seconds on a link",
            f"{wanted}: latency at 1 Gbit/s, {largest}",
        )
        rows = [Row(name, self._reach_cells(sides, rival), jobs) for name, sides, rival in self._compared(costs)]
        return Table(f"{self.title}: where messages are {wanted} as fast", columns, rows)

    def _reach_cells(self, costs: Costs, rival: str) -> list[Cell]:
        line, seconds = self._line(costs, rival), _on_a_link(self.models[-1])
        limits = [_cell(costs, rival, "communication", self.models[-1], network) for network in LIMITS]
        ways = (lambda share: f"{100 * share:.2g}%", lambda share: _short(share * seconds))
        return [*limits, *(Cell(reached(self.claimed, line, show)) for show in ways)]

    def _line(self, costs: Costs, rival: str) -> list[tuple[float, float]]:
        """Speedup of messages by latency, as a share of the transfer time of the gradient."""
        decades = round(math.log10(TO / FROM) * STEPS)
        shares = [FROM * 10 ** (step / STEPS) for step in range(decades + 1)]
        model = self.models[-1]
        networks = [Network(share * _on_a_link(model), 1) for share in shares]
        return [
            (share, costs.gain(rival, "communication", model, network))
            for share, network in zip(shares, networks, strict=True)
        ]

    def _published(self, costs: Costs, jobs: Sequence[Computation]) -> Table:
        over = (self.rival, "the fastest sparse method", self.dense)
        columns = [f"{words}, over {each}" for words in PARTS.values() for each in over]
        rows = []
        for model, preset in self.settings:
            place = (model, PRESETS[preset])
            stated = _cell(self.stated, self.rival, "communication", *place)
            rows.append(Row(f"{MODELS[model].title}, {preset}", [stated, *self._over(costs, *place)], jobs))
        head = ("setting", f"messages, over {self.rival}{BY_FORMULAS}", *columns)
        return Table(f"{self.title}: the published settings", head, rows)

    def _over(self, costs: Costs, model: str, network: Network) -> Iterator[Cell]:
        for part in PARTS:
            strongest = costs.strongest(part, model, network)
            yield _cell(costs, self.rival, part, model, network)
            found = _cell(costs, strongest, part, model, network)
            yield found._replace(text=f"{found.text} ({strongest})")
            yield _cell(costs, self.dense, part, model, network)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        costs = self.costs(scale, results)
        if costs is None:
            return []
        words = (
            f"{self.ours}'s messages: how many times as fast as those of each other method; grey: from the least share "
            "of the published settings to the greatest"
        )
        maps = [
            (BY_FORMULAS, self.stated, self.rival, "communication"),
            *(("", costs, rival, part) for part, rival in product(PARTS, (self.rival, self.dense))),
        ]
        return [
            Picture("reach", words, partial(self._draw_reach, costs), key=self._key(costs)),
            *(picture for each in maps for picture in self._maps(*each)),
        ]

    def _key(self, costs: Costs) -> Mapping[str, palette.Look]:
        level = {f"{self.claimed:g}\u00d7, published": palette.Look(palette.SOFT, ":", "")}
        return {**palette.looks(name for name, *_ in self._compared(costs)), **level}

    def _maps(self, how: str, costs: Costs, rival: str, part: str) -> Iterator[Picture]:
        """One panel per model with a common colour scale."""
        fields = {model: self._fields(costs, rival, part, model) for model in self.models}
        values = [value for each in fields.values() for row in each.values for value in row]
        caption = (
            f"{self.ours}'s {PARTS[part]}: how many times as fast as {rival}'s{how}; framed: a published setting, as "
            "far as we know it"
        )
        span = (min(values), max(values))
        for model, each in fields.items():
            title = f"{MODELS[model].entries / 1e6:.3g} million parameters: {MODELS[model].title}"
            draw = partial(draw_fields, fields=each, words=("Gbit/s", "latency"), span=span)
            yield Picture(f"{part} {rival}{how} {model}", caption, draw, title)

    def _fields(self, costs: Costs, rival: str, part: str, model: str) -> Fields:
        values = [
            [costs.gain(rival, part, model, Network(alpha, gbit)) for gbit in self.bandwidths]
            for alpha in self.latencies
        ]
        published = [PRESETS[preset] for name, preset in self.settings if name == model]
        framed = [(self.latencies.index(each.alpha), self.bandwidths.index(each.gbit)) for each in published]
        texts = [[f"{value:.3g}\u00d7" for value in row] for row in values]
        return Fields(values, [f"{gbit:g}" for gbit in self.bandwidths], [*map(_short, self.latencies)], texts, framed)

    def _draw_reach(self, costs: Costs, figure: Any) -> None:
        lines = {name: self._line(sides, rival) for name, sides, rival in self._compared(costs)}
        axes, looks = figure.subplots(), palette.looks(lines)
        axes_of.plain(axes, "latency / the gradient's seconds on a link", "times as fast, logarithmic")
        for name, line in lines.items():
            shares, gains = zip(*line, strict=True)
            axes.plot(shares, gains, color=looks[name].color, linestyle=looks[name].dash)
        axes_of.logarithmic(axes.yaxis, [gain for line in lines.values() for _, gain in line], "\u00d7")
        axes_of.logarithmic(axes.xaxis, (FROM, TO))
        axes.axhline(self.claimed, color=palette.SOFT, linestyle=":", linewidth=1)
        published = [PRESETS[preset].alpha / _on_a_link(model, PRESETS[preset]) for model, preset in self.settings]
        axes.axvspan(min(published), max(published), color=palette.SOFT, alpha=0.15, linewidth=0)


def _on_a_link(model: str, network: Network = ONE_GBIT) -> float:
    """Transfer time of a model's gradient at full bandwidth without latency, in seconds."""
    return WORD * MODELS[model].entries * network.beta


def _cell(costs: Costs, rival: str, part: str, model: str, network: Network) -> Cell:
    gain = costs.gain(rival, part, model, network)
    return Cell(f"{gain:.3g}", gain)
