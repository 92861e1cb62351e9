"""A step as a picture, a page that can be zoomed, and a trace."""
