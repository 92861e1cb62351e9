"""Text and pictures of plans and steps, for people.

``plan`` shows a plan: a table of its stages, explanations, a PNG of its stage graph. ``step`` shows
steps in time, predicted or measured: a picture, a page. Nothing below imports this room.
"""
