"""The wire's values to the workers' and back: router and workers do not know each other."""

import numpy as np

from forebay.router.wire import JobRequest, WireSampling, WireToken
from forebay.workers.job import Job, Sampling, TokenChoice


def to_sampling(wire: WireSampling) -> Sampling:
    return Sampling(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=tuple((token, bias) for token, bias in wire.logit_bias),
        logprobs=wire.logprobs,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop_ids=tuple(wire.stop_ids),
    )


def to_job(wire: JobRequest, job_id: str, generated: list[TokenChoice], timeout_s: float) -> Job:
    """The job of one try: what was generated so far follows the ids that came, as forced tokens."""
    return Job(
        id=job_id,
        ids=np.array([*wire.ids, *(token.id for token in generated)], np.int32),
        n_prompt=wire.n_prompt,
        seed=wire.seed,
        choice=wire.choice,
        sampling=to_sampling(wire.sampling),
        priority=wire.priority,
        timeout_s=timeout_s,
        session=wire.session,
        salt=wire.salt,
        class_name=wire.class_name,
        stop=wire.stop,
        moved=wire.moved,
    )


def to_wire(token: TokenChoice) -> WireToken:
    return WireToken(id=token.id, logprob=token.logprob, top=list(token.top))


def fault(wire: JobRequest) -> str | None:
    """What makes the request one that no worker could be given, beginning with the field's name."""
    if not 1 <= wire.n_prompt <= len(wire.ids):
        return f"n_prompt: {wire.n_prompt} of {len(wire.ids)} ids"
    if not all(0 <= token < 2**31 for token in wire.ids):
        return "ids: an id is negative or beyond 31 bits"
    if not 0 < wire.timeout_s < float("inf"):
        return f"timeout_s: {wire.timeout_s} is not a positive duration"
    return None
