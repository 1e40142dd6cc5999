"""Our answers.  The files in labs/ are cut from these by ``actmem.lab.cut``: same names, same docstrings, no bodies."""
