"""The labs: for each a file with its exercises, and with the mistakes that the judge can name."""
