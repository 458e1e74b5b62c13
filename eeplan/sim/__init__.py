"""The pure core: schedules, costs, simulation, bounds and search. Never imports torch or megatron."""
