"""Knowledge passed between attempts at a trace: code to rewrite, module calls to explore."""

from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import jax

from tpuport.foundation.user_frames import user_frame
from tpuport.source.rewrite.live import Site, site_of
from tpuport.tracing.core.active import innermost


class UndecidedBranch(BaseException):
    """The truth of a traced value was needed on a path that has no decision for it yet.

    `loops` are those around it that could be one loop of the program: their code and line.
    `unrolled` are the lines of those that were rewritten, and whose rounds run one by one.
    `first` is the outcome to trace first: the one for which the line seems to raise, if either.
    """

    def __init__(
        self,
        value: jax.Array,
        site: str,
        loops: list[tuple[CodeType, int]],
        unrolled: list[str],
        first: bool,
    ) -> None:
        super().__init__(site)
        self.value, self.site, self.loops, self.unrolled = value, site, loops, unrolled
        self.first = first


class RestartTrace(BaseException):
    """Restart of the trace from the beginning with more known.

    It carries what was learned: the code to rewrite, the module call to explore.

    `site` is the code object that ran and the position in it, or None where rewriting cannot help.
    """

    def __init__(
        self,
        *,
        site: tuple[CodeType, Site] | None = None,
        explore: str | None = None,
        within: str | None = None,
        apart: str | None = None,
        views: str | None = None,
        host_state: bool = False,
        watch_draws: bool = False,
        draws_on_host: bool = False,
        records_draws: bool = False,
    ) -> None:
        super().__init__("trace again")
        # A bare `except` in the user's code must not turn it into another path of the program.
        trace = innermost()
        if trace is not None:
            trace.recorder.restart = trace.recorder.restart or self
        self.site, self.explore, self.host_state = site, explore, host_state
        self.within, self.watch_draws, self.apart, self.views = within, watch_draws, apart, views
        self.draws_on_host, self.records_draws = draws_on_host, records_draws


@dataclass
class SpeculationLog:
    """The knowledge that earlier attempts at this trace gained.

    `tried` are the lines (file, line) that the rules have been asked to rewrite, `alone` the code
    that was rewritten in the function that ran it and in no copy of that. `explore` are the
    module calls to run once for each outcome. `within` are those whose branches belong to the call
    around them, which catches what they raise. `apart` are the lines whose outcomes are not merged:
    a later write depends on which tensor came out. `views` are those at which a traced number takes
    a part of a host tensor, where one of the two is written to later. `host_state` says whether
    small state stays concrete, `host_args` which arguments do. `numbers` are the Python numbers on
    modules that became state. `watch_draws` says whether to find the line that draws from a host's
    generator, `draws_on_host` whether Python's numbers are its own, as the code sets the state that
    they come from. `records_draws` says whether its numbers and numpy's are drawn before each call,
    where a program can have such arguments. `drawn_arrays` are the lines that make the arrays which
    are shuffled in place, `varying` those whose numbers and sizes depend on what is drawn.
    `chooses` says whether numbers within narrow bounds are explored one by one where Python needs
    one. `loops` are the loops over a range that were met, with how a round changes their variables,
    or a text that says why not in one way. `branching` are those (file:line) whose rounds branch on
    traced values, so that each would be another path. `whole` says that such a loop has to be one
    loop of the program.
    """

    tried: set[tuple[str, int, int | None]] = field(default_factory=set)
    alone: set[CodeType] = field(default_factory=set)
    explore: set[str] = field(default_factory=set)
    within: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    views: set[str] = field(default_factory=set)
    host_state: bool = False
    watch_draws: bool = False
    draws_on_host: bool = False
    records_draws: bool = False
    drawn_arrays: set[tuple[str, int]] = field(default_factory=set)
    varying: set[str] = field(default_factory=set)
    chooses: bool = False
    numbers: set[str] = field(default_factory=set)
    loops: dict[Any, Any] = field(default_factory=dict)
    branching: set[str] = field(default_factory=set)
    whole: bool = False
    host_args: frozenset[int] = frozenset()
    widened: int = 0

    def widen(self, candidates: list[int]) -> bool:
        """Make the next choice of arguments concrete: each alone, smallest first, then all.

        Return False when all choices were tried.
        """
        choices = [frozenset({i}) for i in candidates]
        if len(candidates) > 1:
            choices.append(frozenset(candidates))
        if self.widened >= len(choices):
            self.host_args = frozenset()
            return False
        self.host_args = choices[self.widened]
        self.widened += 1
        return True

    def try_more(self, candidates: list[int]) -> bool:
        """Make the next choice of arguments concrete, then small state; explore numbers at last.

        Return False when all was tried.
        """
        if self.widen(candidates):
            return True
        if not self.host_state:
            self.host_state = True
            return True
        if self.chooses:
            return False
        self.chooses = True
        return True

    def learn(self, restart: RestartTrace) -> None:
        """Add what a restart asks for."""
        if restart.explore is not None:
            self.explore.add(restart.explore)
        if restart.within is not None:
            self.within.add(restart.within)
        if restart.apart is not None:
            self.apart.add(restart.apart)
        if restart.views is not None:
            self.views.add(restart.views)
        self.host_state = self.host_state or restart.host_state
        self.watch_draws = self.watch_draws or restart.watch_draws
        self.draws_on_host = self.draws_on_host or restart.draws_on_host
        self.records_draws = self.records_draws or restart.records_draws

    def is_new(self, code: CodeType, line: int, column: int | None = None) -> bool:
        """Return whether a line has not been rewritten yet, or not in all functions with its code.

        Args:
            code: The code object that runs.
            line: The line, in the user's file.
            column: Where it begins. None for a loop, which is one as a whole.
        """
        return (code.co_filename, line, column) not in self.tried or code in self.alone

    def ask_for_rewrite(self) -> None:
        """Restart to have the line that runs now rewritten, unless that was tried already.

        Raises:
            RestartTrace: The line has not been tried yet.
        """
        frame = user_frame()
        if frame is None:
            return
        site = site_of(frame)
        if self.is_new(frame.f_code, site.line, site.column):
            raise RestartTrace(site=(frame.f_code, site))
