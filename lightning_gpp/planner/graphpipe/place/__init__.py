"""Plans whose stages share devices: units are placed on groups of devices, stages follow from it.

In the order of reading:

- ``depth_first``, ``unit_tables``: the units in an order in which branches stay together, and what
  sets of them are; ``draft``: a plan as sets of units on devices;
- ``deals``: plans without any search; ``starts``: these and the plans of other planners;
- ``cuts``, ``moves``: the drafts next to one, ``arrange``: in an order in which stages may be
  numbered;
- ``least``: a lower bound of a draft's step, ``judged``: its step, within a budget;
- ``climb``, ``planner``: the search.
"""
