"""Speculative decoding: cheap guesses at the next tokens, verified in one step of the model, that change no output.

    config         the options                       controller     how many drafts pay, from measured times
    plan           the host's side of it: what each request verifies next, and what became of the last drafts
    speculator     the device's side: arrays, executables, and the order in which a step calls them
    proposer       who drafts: `ngram` on the device, `draft_model`, or the host with a `suffix_tree`
    history        each row's tokens on the device, for those who draft there
    verification   samples the target at every draft's position and accepts the longest run of right ones

The host plans how many drafts a request verifies (`ScheduledRequest.num_draft_tokens`) before it knows how many of the
last ones were right, so the device rows own the truth here too: lengths on the host are bounds until a step is read.
"""
