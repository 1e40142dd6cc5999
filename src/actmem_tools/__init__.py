"""Programs on top of both: record any model, solve tapes, plan a job, run a plan."""
