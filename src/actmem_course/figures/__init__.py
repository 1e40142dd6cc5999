"""Drawing: tables, figures and widgets, from rows and results.  Needs neither torch nor numpy."""
