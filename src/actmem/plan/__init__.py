"""The planner, and what frameworks keep, as rows.  Prediction only: no torch."""
