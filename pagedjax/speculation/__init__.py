"""Speculative decoding: cheap guesses at the next tokens, verified in one step of the model, that change no output.

    history        each row's tokens on the device, which device-side proposers read
    ngram          proposes what followed the same tokens before
    verification   samples the target at every draft's position and accepts the longest run of right ones
    speculator     the device side of it all: arrays, executables, and the order in which a step calls them

The host plans how many drafts a request verifies (`ScheduledRequest.num_draft_tokens`) before it knows how many of
the last ones were right, so the device rows own the truth here too.
"""
