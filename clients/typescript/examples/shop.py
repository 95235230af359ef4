# shop.py
import killick


@killick.agent
async def refund(run: killick.Run, order: dict[str, int]) -> str:
    answer = await run.ask(f"Refund {order['amount']}?", to="managers")
    return "refunded" if answer.approved else "kept"
