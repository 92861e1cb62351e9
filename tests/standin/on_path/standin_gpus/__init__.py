"""A device named ``cuda`` in the CPU build of torch: streams are threads, memory is the host's.

The native library (``tests/standin/native``) is the device; this package is what ``torch.cuda``
is in a build with CUDA. ``start`` loads both when a process imports torch.
"""
