"""The parts of ``eeplan bench`` that need torch: what is timed, in the processes that time it."""
