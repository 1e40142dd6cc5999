"""Our answers.  The files in labs/ are cut from these by ``actmem_course.cut``: same names, same docstrings, no
bodies."""
