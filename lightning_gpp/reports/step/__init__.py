"""A step as a picture and a page that can be zoomed."""
