"""One file per schedule, one pure function each: a placement and a count in, a `Schedule` out."""
