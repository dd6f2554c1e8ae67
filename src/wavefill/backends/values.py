"""What a call's tensors must not hold, in words; both backends find it, each in its own way."""

from __future__ import annotations

from wavefill.spec import InvalidArgument, invalid


def value_error(
    fault: int, request: int, value: int, slot: int, *, capacity: int, pages: int, tokens: int
) -> InvalidArgument:
    """The error for a value that a tensor of a call must not hold.

    fault: 1 a negative length, 2 one past the capacity, 3 a page id out of range in a slot that is read, 4 offsets
           that do not start at 0, 5 that decrease, 6 that end past the query tokens, 7 a request with more query
           tokens than a row of the mask has bits, 8 a sink that is NaN or infinite (but for -inf, which is none), 9 a
           slope and 10 a scale of K (slot 0) or V (slot 1) that is NaN or infinite.
    request, value, slot: where, and what was found; for 7 the request's tokens, and the words of a row; from 8 on the
           head, and 0 for NaN or the sign of an infinity.
    """
    match fault:
        case 1:
            return invalid(f"seq_lens[{request}]", "must not be negative", value,
                           "A request without keys has length 0.")
        case 2:
            return invalid(f"seq_lens[{request}]", f"must be at most the cache's capacity of {capacity} tokens", value,
                           "Widen block_table or the cache, or shorten the request.")
        case 3:
            rule = f"must be a page id from 0 to {pages - 1}" if pages else "must not be read, as there are no pages"
            return invalid(f"block_table[{request}, {slot}]", rule, value,
                           "Slots past a request's last page may hold anything; this one is read.")
        case 4:
            return invalid("cu_seqlens_q[0]", "must be 0", value, "Offsets start at the first query token.")
        case 5:
            return invalid(f"cu_seqlens_q[{request + 1}]", "must not be below the offset before it", value,
                           "Build it as a running sum of the query lengths.")
        case 7:
            return invalid("mask", f"must have a bit for each of the {value} query tokens of request {request}",
                           f"{32 * slot} bits a row", "Make it with wavefill.pack_mask(masks).")
        case 8:
            return invalid(f"sinks[{request}]", "must be finite, or -inf for a head without one", _NO_NUMBER[value],
                           "Look at the weights that they come from.")
        case 9:
            return invalid(f"alibi_slopes[{request}]", "must be finite", _NO_NUMBER[value],
                           "Give 0 to a head without a bias.")
        case 10:
            return invalid("v_scale" if slot else "k_scale", f"must be finite (KV head {request})", _NO_NUMBER[value],
                           "Give the scales that the cache was written with.")
        case _:
            return invalid("cu_seqlens_q[-1]", f"must be at most the {tokens} query tokens of q", value,
                           "Pass all query tokens, or a smaller last offset.")


def slot_error(at: int, slot: int, *, pages: int, page_size: int) -> InvalidArgument:
    """The error for slots[at] of an append, which lies past the cache."""
    return invalid(f"slots[{at}]", f"must be below pages x page_size = {pages * page_size}", slot,
                   "Grow the cache or correct the slot.")


_NO_NUMBER = {0: "NaN", 1: "inf", -1: "-inf"}
