"""What handlers in processes have done, as the client reads it: records, names of threads, and what was left."""
