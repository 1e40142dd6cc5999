"""How long a test waits for what comes in seconds on an idle machine: no test asks how fast something is."""

SECONDS = 600
