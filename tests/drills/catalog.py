"""All drills: which there are, and how often each runs in `make drills` and in `make drills-short`."""

from drills import kills, losses, network, pressure
from drills.drill import Drill

NO_GROUP_GAP = 45.0  # seconds for which streams wait where no group is ready
FULL_GAP = 30.0  # where every group is full and those that were preempted wait their turn

DRILLS = [
    Drill(act=kills.kill_rank, hits=1),
    Drill(act=kills.kill_engine, hits=1),
    Drill(act=kills.stop_rank, hits=1),
    Drill(act=kills.stop_engine, hits=1),
    Drill(act=kills.kill_router),
    Drill(act=kills.drain_and_resume),
    Drill(act=kills.drain_long, tokens=440),
    Drill(act=kills.rollout_restart, hits=2),
    Drill(act=kills.scale_down_and_up, hits=1),
    Drill(act=kills.kill_both_groups, hits=2, longest_gap=NO_GROUP_GAP),
    Drill(act=losses.kill_gateway),
    Drill(act=losses.stop_gateway),
    Drill(act=losses.kill_controller, hits=2, longest_gap=NO_GROUP_GAP),
    Drill(act=losses.kill_head),
    Drill(act=network.link_down, setting=network.namespace, longest_gap=network.OUTAGE + 10.0),
    Drill(act=network.cut_line, setting=network.namespace),
    Drill(act=network.reset_line, setting=network.namespace),
    Drill(act=network.slow_link, setting=network.namespace),
    Drill(act=network.late_line, setting=network.namespace),
    Drill(act=pressure.exhaust_kv, setting=pressure.few_blocks, streams=12, queues=True, hits=1, longest_gap=FULL_GAP),
    Drill(act=pressure.flood_queue, setting=pressure.short_queue, queues=True),
    Drill(act=pressure.fill_disk, setting=pressure.small_disk, hits=1),
    Drill(act=pressure.jump_clock, setting=pressure.odd_clock),
]
BY_NAME = {drill.name: drill for drill in DRILLS}

SHORT = [*["kill_rank", "kill_engine"] * 3, "stop_rank", "kill_router", "drain_and_resume"]
OFTEN = {"kill_rank": 25, "kill_engine": 25, "stop_rank": 3, "stop_engine": 3, "kill_router": 3, "drain_and_resume": 3}
LONG = [drill.name for drill in DRILLS for _ in range(OFTEN.get(drill.name, 1))]


def chosen(names: list[str], repeat: int) -> list[Drill]:
    """Those drills in this order, the whole list `repeat` times. KeyError for one that there is not."""
    return [BY_NAME[name] for name in names * repeat]
