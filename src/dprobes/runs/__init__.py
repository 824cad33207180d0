"""
Runs of probe programs.

::

    Request ─► Vantage ─► ProgramInput ─► Resolution ─► RunPlan ─► Attachment ─► events
       look_around    load          resolve        plan      attach       follow

``run_steps`` has the steps, and ``run_program`` executes them. The command line, the Python API and the manager each
have a ``Face``, which loads a program and shows the events. The API and the manager follow an attachment in a thread
(``followed_program``); the command line follows it in its main thread. An engine plans a job and attaches the plan
(``engines.engine_interface``); a group of attachments is an attachment (``engines.attachment_group``).
"""
