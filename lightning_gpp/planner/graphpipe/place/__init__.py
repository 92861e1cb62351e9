"""Plans as units placed on groups of devices, and a climb from such a plan to better ones.

In the order of reading:

- ``depth_first``, ``unit_tables``: the units in an order in which branches stay together, and what
  sets of them are; ``draft``, ``drafted``: a plan as sets of units on devices;
- ``homes``, ``own_homes``: the devices that stages may go to, shared or their own;
- ``cuts``, ``moves``, ``redealt``: the drafts next to one; ``arrange``: in an order in which stages
  may be numbered;
- ``least``: a lower bound of a draft's step, ``judged``: its step, within a budget;
- ``climb``: the search; ``deals``: plans without any search, to begin with;
- ``planner``: the planner ``graphpipe``, whose stages share devices.
"""
