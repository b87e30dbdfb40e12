// A handler in Node: the work and the record of the event are one transaction (docs/consuming-tuning.md).
async function handle(pool, eventId, work) {
  const client = await pool.connect();
  try {
    await client.query("BEGIN");
    const { rows } = await client.query("SELECT processed_mark($1, $2) AS is_new", [eventId, "billing"]);
    if (rows[0].is_new) await work(client);
    await client.query("COMMIT");
  } catch (error) {
    await client.query("ROLLBACK");
    throw error;
  } finally {
    client.release();
  }
}

module.exports = { handle };
