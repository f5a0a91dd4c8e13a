"""How a region runs as straight code. A reader starts at the top of this list:

- ``captured_region``: the states of a region on its way to code, and a program; ``region_record`` counts for it.
- ``captured_graph``: graphs of a forward, and which of them runs a call. ``guards`` takes and finds them by torch's
  frontend, with the changes in ``frontend`` and the further guards in ``called_methods``.
- ``region_tapes``, ``recording``, ``following``: the ops of one frame, written down and compared with a graph's.
- ``observation``: the same for its backward, node by node of autograd's graph (``region_graph``).
- ``program_writer``: makes a ``program`` of an observed frame, as Python code (``codegen``, ``statements``,
  ``earlier_calls``). ``generated/`` has kernels for groups of its ops.
- ``captured_function``: runs a program as one node of autograd's graph, or its graph again (``held_inputs``).
- ``function_calls`` and ``autocast_settings``: custom Functions, autocast and torch's switches in all of that.
- ``runner``, ``under_torch_compile``, ``partitioner``: modules under a rule, and the rule in compiled code.
"""
