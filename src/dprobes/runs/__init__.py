"""
The run of a program.

::

    Request ─► Vantage ─► ProgramInput ─► Resolution ─► RunPlan ─► Attachment ─► what happens
    look_around    load          resolve        plan      attach       follow

``run_steps`` has the steps, ``carry_out`` takes them. The command line, the Python API and the manager are faces of it:
each has a program to load, and shows what happens. The API and the manager have a thread follow an attachment
(``followed_program``); the command line does so itself. An engine plans a job and attaches the plan
(``engines.engine_interface``); a group of attachments is an attachment (``engines.attachment_group``).
"""
