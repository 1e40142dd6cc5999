"""The planner: layouts, bills and times.  Begin with ``search.Request``.  Prediction only: no torch."""
