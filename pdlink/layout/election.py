"""Owns the election of the one prefill rank that sends a request's aux. Both sides compute it from the same facts."""

from __future__ import annotations

from pdlink.layout.components import CacheLayout
from pdlink.layout.layer_plan import LayerPlan, OwnedLayers
from pdlink.layout.parallel import RankCoordinates


def may_send_aux(layout: CacheLayout, owned: OwnedLayers, rank: RankCoordinates) -> bool:
    """Whether a rank can be elected: it has the last layer that any component has, at tp 0.

    The last layer's owner is the natural one, because its cache is final last. Which of several components counts goes
    by their names, not by the order in which a side lists them. Under a replicated plan several ranks qualify; each
    sends, and the receiver takes the elected one's.
    """
    model = [one for one in layout.components if one.layers and not one.is_draft]
    last = max(model, key=lambda one: (one.layers[-1], one.name))
    return rank.tp == 0 and last.layers[-1] in owned.get(last.name, ())


def elect_aux_owner(layout: CacheLayout, plan: LayerPlan, dp: int) -> RankCoordinates:
    """The least of the ranks of one dp group that may send the aux. The plan is whole, so there is one."""
    return min(rank for rank, owned in plan.owned.items() if rank.dp == dp and may_send_aux(layout, owned, rank))
