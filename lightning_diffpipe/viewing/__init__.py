"""Looking at plans and runs: text, traces, reports. Pure, except for `plot`."""
