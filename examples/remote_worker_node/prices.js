// Prices that agents look up: a Temporal worker in JavaScript, which knows nothing of Muster.
//
// `node prices.js`, where `@temporalio/worker` and `@temporalio/activity` are installed.
// TEMPORAL_ADDRESS and PRICES_QUEUE say where Temporal is, and which task queue to poll.

const { NativeConnection, Worker } = require("@temporalio/worker");
const { ApplicationFailure, activityInfo } = require("@temporalio/activity");

const CENTS = { apples: 45, pears: 60, plums: 20 };

// The activity's id is the call's id: whatever must not be done twice is done under it.
async function price_of({ item }) {
  if (!(item in CENTS)) throw ApplicationFailure.nonRetryable(`we do not sell ${item}`);
  console.error(`call ${activityInfo().activityId}`);
  return { item, cents: CENTS[item] };
}

async function main() {
  const address = process.env.TEMPORAL_ADDRESS ?? "127.0.0.1:7233";
  const connection = await NativeConnection.connect({ address });
  const taskQueue = process.env.PRICES_QUEUE ?? "prices";
  const worker = await Worker.create({ connection, taskQueue, activities: { price_of } });
  await worker.run();
}

main().catch((error) => {
  console.error(`error: ${error.message}`);
  process.exitCode = 1;
});
