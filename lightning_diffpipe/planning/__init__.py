"""What each rank shall do: pure functions and frozen data, standard library only.

Read the files in the order in which a plan comes about:

    profile -> cluster -> cost -> partition -> instruction -> schedule -> schedules/ -> lowering
    -> timeline -> search -> plan
"""
