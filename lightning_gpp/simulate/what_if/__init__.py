"""What a change of devices, links or costs would bring."""
