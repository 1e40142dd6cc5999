"""Our solutions of the exercises.  ``actmem_course.strip_solutions`` generates the files in labs/ from them: the same
names and docstrings, without bodies."""
