"""The planner: layouts, bills and times.  Begin with ``search.find_plans``.  Prediction only: no torch."""
