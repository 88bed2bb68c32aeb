"""Every threshold of the verdict, with its reason.

None of them was tuned on the bugs that the power table is about: they come from published rules, from
designed error rates, or from honest pairs alone.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["loss", "reward", "score"]

RULES_SINCE = "2026-11-19"
"""Day of the last change of what calls a pair different: an older power table is of other rules."""

# outcome

MARGINS: dict[Kind, float] = {"loss": 0.02, "reward": 0.04, "score": 0.05}
"""In the metric's own unit. Loss and reward: the published rules of verl and OpenRLHF ("2 %", "4 %").
Validation scores: the 5 % of the community's acceptance tasks."""

FALSE_ALARMS = 0.01
"""How often curves that only round otherwise may be called a different computation, over all metrics and
windows together."""

CONFIDENCE = 0.95
"""Least confidence of the intervals, which are shown and decide: within the margin is equivalent, wholly
beyond it different."""

CLEAR = 1e-5
"""Free-running policy losses do not decide how good a run is, unless a difference has a smaller chance."""

WHOLE_ALARMS, LAST_ALARMS, QUARTER_ALARMS = 0.005, 0.0025, 0.0008
"""How often pairs without a difference may be called different by the mean over the whole run, over its last
quarter and over each other quarter; 1 % together. An interval beyond the margin is widened for it."""

WHOLE_SHARE, QUARTERS_SHARE = 0.25, 0.1
"""The parts of `FALSE_ALARMS` that are spent on the mean over the whole run, which sees most, and on those
over its quarters together. The rest is for what the noise model does not know: in simulations of
strongly correlated noise it is used up (benchmarks/parity_calibration.py)."""

FLAT = 0.05
"""A curve whose changes from step to step are smaller than this share of the other's does not train.
Honest runs of one recipe differ in noise by less than a factor of 2."""

FEWEST_STEPS = 8
"""Below this, the noise of a curve cannot be told from its course: it is never called different."""

OTHER_LEVEL = 2.0
"""Response length, KL, entropy, gradient norm, clip ratios and throughput of honest runs of one recipe stay
within this factor of each other, in level and in growth. Beyond, a pair is not called equivalent."""

# noise of a difference of two curves

COURSE = 3
"""Cosines of a difference that count as its course (level, slope, bend), not as noise: another speed of
learning must not pass for noise."""

LEVEL = 1
"""Cosines that are left out where a pair may be equivalent: the mean alone. Without the next two, nothing
rules out slow noise in a short run. There, noise is as likely white as not before a curve is seen, because
each step has data of its own. Of honest pairs of 100 steps, 62 % were equivalent without either."""

SLOWEST = 0.955
"""The largest autocorrelation from one step to the next that noise may have in short runs; in longer ones,
`1 - SLOWEST_STEPS / steps`. What is slower than a tenth of the run cannot be told from a course."""
SLOWEST_STEPS = 10.0

MOST_POINTS = 4096
"""Longer curves are averaged in blocks to so many points: noise is slow or averages out."""

# paired or free-running

SAME_CORRELATION, DIFFERENT_CORRELATION = 0.999, 0.95
"""Correlation of the changes from step to step. Honest pairs on the same data have 0.998 and more (published
curves of two vendors), another order of the data about 0."""

OTHER_DATA = 0.5
"""Below this correlation the curves go through other data, or another order of it, however small the
differences are."""

SAME_SHARE, DIFFERENT_SHARE = 2e-6, 0.1
"""The mean error as a share of a flat line's. Float32 runs that only round otherwise stay below the first;
honest bfloat16 pairs reach 0.02."""

FLOOR = 1e-3
"""Curves on the same data mean another computation only if they differ by more than this share of their
mean size. Below, rounding of narrow types can have a sign too: then an envelope decides."""

FIRST_STEP = 0.1
"""Gradient norm and entropy of the first step, which both runs begin with the same weights, mean another
computation beyond this share. Honest bfloat16 pairs reached 0.0007; later steps drift."""

MEMBER_SLACK = 4.0
"""With an envelope: how many times as far from 1 as its worst member's a correlation may be, if that is
further than `DIFFERENT_CORRELATION`; the same for shares."""

# envelope

FEWEST_MEMBERS = 3
"""Two runs have one distance, and no spread of distances."""

SPREAD_FLOOR = 0.4
"""The least standard deviation that is believed of the logarithms of the members' largest statistics: few
members can be alike by chance. In simulations of all kinds of noise it is 0.3 to 0.6."""

INFORMATIVE = 0.5
"""An envelope is narrow enough to say `same` if what it would just not notice is below this share of the
margin."""

# seeds and reruns

PRIOR_RUNS = 5
"""How many runs the noise within a run weighs as, beside the spread between runs: few runs alone give an
interval of no use. Where the spread contradicts it at `CONFLICT`, a usual spread takes its place, and where
it contradicts that too, the spread alone counts."""
CONFLICT = 0.05
USUAL_SPREAD = 0.25
"""Spread between runs that differ in their seed, as a share of the margin."""

FEWEST_RUNS = 3
"""Pairs of runs before the spread between them counts alone: of paired curves and of validation scores."""
